"""What the workflow costs: seconds of an iteration in which no stage's body runs, in one process and on workers.

    grpo up --detach
    python tests/benchmarks/orchestration.py [--address HOST:PORT] [--iterations 10] [--rounds 2] [settings]

Runs with and without workers alternate; the first iterations, in which engines start, do not count. Prints a Markdown
table.
"""

import argparse
import tempfile

from overlap import CONFIG, SETTINGS, seconds_per_iteration, train

from grpo_lib.config_files import load_config
from grpo_lib.tracking.reports import seconds_between_stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("settings", nargs="*")
    asked = parser.parse_args()
    kinds = {"local": ["placement.kind=local"]}
    if asked.address:
        kinds["ray"] = ["placement.kind=ray", f"placement.ray.address={asked.address}"]
    rows = []
    with tempfile.TemporaryDirectory() as store:
        common = [*SETTINGS, f"store.uri={store}", *asked.settings]
        for kind, own in kinds.items():  # engines and workers start
            train(load_config(CONFIG, [*common, *own, f"name={kind}-warm", "iterations=1"]))
        for number in range(asked.rounds):
            for place, (kind, own) in enumerate(kinds.items()):
                seed = 1 + number * len(kinds) + place  # its own: a run adopts what another has made with the same
                given = [f"name={kind}-{number}", f"seed={seed}", f"iterations={asked.iterations}"]
                manifests = train(load_config(CONFIG, [*common, *own, *given]))
                whole, between = seconds_per_iteration(manifests), seconds_between_stages(manifests) or 0.0
                rows.append(f"| {kind} | {number} | {whole:.2f} | {1000 * between:.0f} | {between / whole:.1%} |")
                print(rows[-1], flush=True)
    print("\n| placement | round | s an iteration | outside stage bodies (ms) | fraction |\n|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
