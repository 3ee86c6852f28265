"""Rewards that the tests name as MODULE:FUNCTION."""


def parity(problem, rollout) -> float:
    """0 or 1, and not the same for all rollouts of a group, whatever a model writes."""
    return float(sum(rollout.tokens) % 2)


def length(problem, rollout) -> float:
    return rollout.response_tokens / rollout.max_tokens
