"""The demo with several seeds, each a run of the real command: `python tests/benchmarks/demo_seeds.py [SEED...]`.

Prints a Markdown table; runs that are in the store already are not computed again.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deployments" / "configs" / "demo.yaml"


def run(seed: int) -> dict[str, object]:
    began = time.monotonic()
    command = [sys.executable, "-m", "flows.cli.main", "run", str(CONFIG), f"seed={seed}", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"wall": time.monotonic() - began}


def main() -> None:
    seeds = [int(each) for each in sys.argv[1:]] or [0, 1, 2]
    print("| seed | mode | before | after | gain (points) | ms an iteration outside stages | wall (s) |")
    print("|---|---|---|---|---|---|---|")
    for seed in seeds:
        result = run(seed)
        between = 1000 * float(str(result["seconds_between_stages"]))
        for each in result["accuracy"]:  # type: ignore[attr-defined]
            before, after = each["before"], each["after"]
            print(
                f"| {seed} | {each['mode']} | {before:.3f} ± {each['before_se']:.3f} | {after:.3f} ± "
                f"{each['after_se']:.3f} | {100 * (after - before):+.1f} | {between:.0f} | {result['wall']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
