"""Scale, by simulation: iteration time and the best split for 8B and 70B models on 8 to 512 GPUs.

    python tests/benchmarks/scale/run.py [--plots docs/images] [--json FILE]
    python tests/benchmarks/scale/run.py --check STORE RUN RUN ...

The first prints predictions, what they depend on, and the simulation of set-ups that others measured. The second takes
finished runs of this project, of different sizes, and predicts each from constants fitted on the others.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.scale import tables
from tests.benchmarks.scale.check import fit, leave_one_out
from tests.benchmarks.scale.hardware import Efficiency
from tests.benchmarks.scale.measured import measured_run
from tests.benchmarks.scale.published import compare, steps, typical_ratio
from tests.benchmarks.scale.scenarios import SCENARIOS, predict, sensitivities

SENSITIVE = (("llama-8b", 64), ("llama-70b", 256))


def simulate_all(plots: Path | None) -> dict[str, Any]:
    predictions, compared = predict(), compare(Efficiency())
    sensitive = [each for model, gpus in SENSITIVE for each in sensitivities(model, gpus)]
    for scenario in SCENARIOS:
        print(f"\n## Predictions, {scenario}\n\n{tables.predictions(predictions, scenario)}")
        print(f"\n### Seconds a stage, {scenario}, max_staleness 1\n\n{tables.stages(predictions, scenario, 1)}")
    print(f"\n## Sensitivity\n\n{tables.sensitivity(sensitive)}")
    print(f"\n## Published figures\n\n{tables.comparisons(compared)}")
    if plots is not None:
        from tests.benchmarks.scale.plots import draw_published, draw_sensitivity, draw_stages, draw_times

        _, spread = typical_ratio(steps(compared))
        draw_times(predictions, spread, plots / "scale-time.png")
        draw_stages(predictions, plots / "scale-stages.png")
        draw_sensitivity(sensitive, plots / "scale-sensitivity.png")
        draw_published(compared, plots / "scale-published.png")
    return {
        "predictions": [asdict(each) for each in predictions],
        "sensitivity": [asdict(each) for each in sensitive],
        "published": [asdict(each) | {"ratio": each.ratio} for each in compared],
    }


def check(store: str, names: list[str]) -> dict[str, Any]:
    runs = [measured_run(store, name) for name in names]
    found = leave_one_out(runs)
    machine = fit([each for run in runs for each in run.samples()])
    print(tables.errors(found))
    print("\nConstants fitted on all runs (seconds a stage, row, decoding step, operation, byte):\n")
    rows = [
        (stage, *(f"{term}: {value:.3g}" for term, value in costs.items())) for stage, costs in machine.costs.items()
    ]
    print("\n".join(f"- {row[0]}: {', '.join(row[1:])}" for row in rows))
    return {"errors": [asdict(each) | {"relative": each.relative} for each in found], "costs": machine.costs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plots", type=Path, help="Folder for the pictures.")
    parser.add_argument("--json", type=Path, help="File for all numbers.")
    parser.add_argument("--check", nargs="+", metavar=("STORE", "RUN"), help="Measured runs to predict one another.")
    asked = parser.parse_args()
    if asked.check and len(asked.check) < 3:
        parser.error("--check takes a store and at least two runs")
    result = check(asked.check[0], asked.check[1:]) if asked.check else simulate_all(asked.plots)
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
