"""Reward functions by name.

To add one write a function of ``sample`` (or ``samples``: all of a shard, for a list in the same order), plain or
``async``, with its options keyword-only, and put ``@REWARDS.register("name")`` above it. A user's module does the same
and is named in ``algorithm.plugins``; a file of one's own needs no registration (``reward.functions: [{path: ...}]``).

Traits:
    isolated: True for what may hang or crash on a response: it runs in a process of its own.
    modules: those that belong to it; with its own file they make up the digest of what it computes.
    files: options that name a file or folder, whose content belongs to that too.
    packages: those whose version belongs to that: another one may judge otherwise.
    imports: packages that are imported before its first sample, whose time they would take.
    check: a function of its options that raises a ``GrpoError`` if it can't work on this machine.
"""

from grpo_lib.algorithms.registry import Registry
from grpo_lib.types import AnyRewardFunction

REWARDS: Registry[AnyRewardFunction] = Registry(
    "reward function",
    columns={"sample": "one response with its prompt and reference", "samples": "the responses of a shard"},
)
