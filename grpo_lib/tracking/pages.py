"""What people read about a run that goes on, as Markdown: its curves, and rollouts of its last iteration."""

import re
from collections.abc import Mapping
from typing import Any

from grpo_lib.tracking.chart import charts, data_uri
from grpo_lib.tracking.history import History

LONGEST = 1200
"""Characters of a prompt or response; of more the middle is left out."""


def curves_page(history: History, title: str) -> str:
    """A picture inside the text: no server has to hand it out."""
    panels = {
        "Held-out accuracy": {
            mode: history.curve(f"evaluate/{mode}_accuracy") for mode in ("sampled", "greedy")
        },
        "Mean reward": {"reward": history.curve("reward/mean")},
        "Mean response length (tokens)": {"length": history.curve("rollout/length_mean")},
        "Entropy (nats)": {
            "entropy": history.curve("old_logprobs/entropy", "update/entropy", "rollout/surprise"),
        },
    }  # fmt: skip
    return f"# {plain(title)}\n\n![curves of the run]({data_uri(charts(panels))})"


def links_page(links: Mapping[str, str]) -> str:
    """Names to addresses; what is no web address is shown as it is."""
    lines = []
    for name, address in links.items():
        is_web = address.startswith(("http://", "https://"))
        lines.append(f"- [{plain(name)}]({address})" if is_web else f"- {plain(name)}: {code(address)}")
    return "\n".join(lines)


def rollouts_page(rollouts: Mapping[str, Mapping[str, Any]], iteration: int) -> str:
    """Rollouts by what they are examples of, with reward and advantage."""
    parts = [f"# Rollouts of iteration {iteration}"]
    for label, row in rollouts.items():
        advantage = "" if row["advantage"] is None else f", advantage {row['advantage']:+.3f}"
        parts.append(f"## {label}: reward {row['value']:.3f}{advantage}")
        about = [f"rollout {code(row['rollout_id'])}", f"{row['tokens']} tokens", f"ended by {row['finish_reason']}"]
        if row["reference"]:
            about.append(f"reference {code(cut(row['reference'], 100))}")
        parts += [", ".join(about), fenced(row["prompt"]), fenced(row["text"])]
    return "\n\n".join(parts)


def cut(text: str, longest: int = LONGEST) -> str:
    """Without its middle if it is too long.

    >>> cut("abcdefghij", 4)
    'ab\\n[... 6 characters left out ...]\\nij'
    """
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def fenced(text: str) -> str:
    """As a block of code in which nothing is Markdown or HTML, whatever it holds.

    >>> print(fenced("a ``` b"))
    ````text
    a ``` b
    ````
    """
    longest = max((len(each) for each in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{cut(text)}\n{fence}"


def code(text: str) -> str:
    """As code within a line.

    >>> print(code("a`b"))
    ``a`b``
    """
    line = " ".join(str(text).split())
    fence = "`" * (max((len(each) for each in re.findall("`+", line)), default=0) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}"


def plain(text: str) -> str:
    """With every sign that means something in Markdown or HTML made harmless.

    >>> plain("a_b <i>")
    'a\\\\_b \\\\<i\\\\>'
    """
    return re.sub(r"([\\`*_{}\[\]<>()#|!~&])", r"\\\1", text)
