"""A damaged artifact that was made again takes the place of the damaged one, byte for byte."""

import tempfile
from pathlib import Path

from grpo_lib.errors import NotFoundError
from grpo_lib.storage import paths
from grpo_lib.storage.manifests import Manifest, Part, Remake
from grpo_lib.storage.objects import ObjectStore


def part_problem(objects: ObjectStore, part: Part) -> str | None:
    """What is wrong with a stored part; None: nothing."""
    try:
        size, digest = objects.sha256(part.path)
    except NotFoundError:
        return "does not exist"
    if size != part.size:
        return f"has {size} bytes and not {part.size}"
    return None if digest == part.sha256 else "has another sha256 than its manifest says"


def restored(objects: ObjectStore, made: Manifest, remake: Remake) -> Manifest:
    """The artifact as it was before the damage, if ``made`` has its content: its files are whole again, those of
    ``made`` are gone. Its manifest is the caller's to create.

    So whoever else refers to the files (runs that adopted them, MLflow) finds them whole again, and the points of the
    artifact in MLflow keep their times. Damaged files are set aside first.
    """
    if remake.manifest is None:
        return made
    try:
        original = Manifest.model_validate_json(objects.get(remake.manifest))
    except NotFoundError:  # somebody has tidied up what was set aside
        return made
    if original.digest != made.digest:
        return made
    for new, old in zip(made.parts, original.parts, strict=True):
        if part_problem(objects, old) is not None:
            _replace(objects, old, new)
    objects.delete([part.path for part in made.parts])
    return original


def _replace(objects: ObjectStore, old: Part, new: Part) -> None:
    with tempfile.TemporaryDirectory(prefix="grpo-remake-") as folder:
        file = Path(folder, "part")
        try:
            objects.fetch(old.path, file)
        except NotFoundError:
            pass
        else:
            objects.put_file(paths.aside_part(old.path), file)
        objects.fetch(new.path, file)
        objects.put_file(old.path, file)
