"""`make chaos`: many small runs, in each of which something is killed or fails, as their seeds say.

    python -m tests.chaos --seeds 200
    python -m tests.chaos --seed 17        # that one again

Prints a line a seed, and ends with code 1 if one of them went wrong.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.chaos.play import Game, Outcome
from tests.chaos.scenario import draw
from tests.chaos.world import world

COLUMNS = "{:>5}  {:6}  {:7}  {:74}  {:>5}  {:>7}  {:>14}  {}"
HEADER = COLUMNS.format("seed", "store", "variant", "what happened", "flows", "seconds", "rollouts", "end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="How many, from --first on.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="Only this one.")
    parser.add_argument("--json", type=Path, help="File for the outcomes.")
    parser.add_argument("--keep", type=Path, help="Folder for stores and logs; default: a temporary one.")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="grpo-chaos-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with world(folder.resolve(), {"rollout": 1, "train": 1}) as where:
            print(HEADER, flush=True)
            for seed in seeds:
                outcomes.append(Game(where, draw(seed)).play())
                print(line(outcomes[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    bad = [each for each in outcomes if each.problems]
    again = sum(each.in_flight for each in outcomes)
    print(f"{len(outcomes)} runs, {len(bad)} went wrong; {again} rollouts had to be generated again")
    return 1 if bad else 0


def line(outcome: Outcome) -> str:
    """Of the table. Rollouts: generated = committed + in flight when something was killed."""
    scenario = outcome.scenario
    rollouts = f"{outcome.generated} = {outcome.committed} + {outcome.in_flight}"
    what, seconds = ", ".join(outcome.happened), f"{outcome.seconds:.1f}"
    end = "; ".join(outcome.problems) or "the same"
    return COLUMNS.format(scenario.seed, scenario.store, scenario.variant, what, outcome.flows, seconds, rollouts, end)


if __name__ == "__main__":
    sys.exit(main())
