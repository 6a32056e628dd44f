"""What is imported when: `grpo --help` answers at once, and imports go one way."""

import resource
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
HELP = "import sys; sys.argv = ['grpo', '--help']; import flows.cli.main as cli; cli.app(standalone_mode=False)"


def loaded_by(code: str, packages: set[str]) -> set[str]:
    """Which of the packages are imported after ``code``."""
    code += f"\nprint('loaded:', *sorted({packages!r} & sys.modules.keys()), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stderr.rpartition("loaded:")[2].split())


def test_help_loads_no_heavy_package() -> None:
    heavy = {"torch", "transformers", "prefect", "mlflow", "vllm", "ray", "pyarrow", "duckdb", "boto3", "pydantic"}
    assert loaded_by(HELP, heavy) == set()


@pytest.mark.parametrize("command", ["run", "resume", "show", "rollouts", "evaluate", "warm-start", "doctor"])
def test_the_help_of_a_command_loads_no_heavy_package(command: str) -> None:
    code = HELP.replace("'--help'", f"{command!r}, '--help'")
    assert loaded_by(code, {"torch", "transformers", "prefect", "mlflow", "vllm", "ray", "pyarrow"}) == set()


def test_the_configuration_loads_no_heavy_package() -> None:
    heavy = {"torch", "transformers", "prefect", "mlflow", "vllm", "ray", "pyarrow", "numpy", "boto3"}
    assert loaded_by("import sys, grpo_lib.config", heavy) == set()


def test_what_checks_a_run_before_it_starts_loads_no_heavy_package() -> None:
    assert loaded_by("import sys, grpo_lib.preflight", {"torch", "transformers", "prefect", "mlflow", "vllm"}) == set()


def test_help_takes_at_most_a_second_of_cpu_time() -> None:
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([SCRIPTS / "grpo", "--help"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) <= 1.0, f"took {seconds}"


def test_the_import_rules_are_kept() -> None:
    done = subprocess.run(
        [SCRIPTS / "lint-imports", "--no-cache"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:]
