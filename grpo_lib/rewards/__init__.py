"""Scoring of responses: `grpo_lib.rewards.runner` runs a reward function over samples.

Reward functions come with their problems (``Problem.make_reward``). One that fails on a response gives a null with a
reason, never a 0: a fault of the reward function must not look like a bad response.
"""
