"""What tests and the plugin `rank_losses` both know; importing the plugin itself registers its loss."""

ACCIDENT = "GRPO_TEST_ACCIDENT"
"""Environment: ``<what>:<call>:<folder>``; what happens (kill, raise, hang) at which call of the loss in a process."""
