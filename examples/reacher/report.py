"""What is written of a run: the lines and the table of the documentation."""

from typing import NamedTuple


class Result(NamedTuple):
    """What became of the scenes of one seed.

    Attributes:
        seed: of the scenes, none of which was trained on.
        scenes: how many.
        policy: touched by the model, through openpi's client and vLLM.
        transformers: touched by the same model in transformers.
        equal: scenes in which all actions of both are equal.
        expert: touched by the expert whom the model imitates, who knows where the discs are.
        random: touched by random actions.
    """

    seed: int
    scenes: int
    policy: int
    transformers: int
    equal: int
    expert: int
    random: int


def write_table(results: list[Result]) -> str:
    """Return the results as a table of the documentation."""
    columns = ["scenes", "openpi's client and vLLM", "transformers", "all actions equal", "expert", "random actions"]
    lines = [f"| {' | '.join(columns)} |", "| --- | --- | --- | --- | --- | --- |"]
    for result in results:
        cells = [f"seed {result.seed}"]
        for number in (result.policy, result.transformers, result.equal, result.expert, result.random):
            cells.append(f"{number} of {result.scenes}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_line(results: list[Result]) -> str:
    """Return the results in one sentence."""
    scenes = sum(result.scenes for result in results)
    policy = sum(result.policy for result in results)
    random = sum(result.random for result in results)
    return (
        f"Driven by openpi's client, the arm touches the right disc in {policy} of {scenes} scenes that it was not "
        f"trained on; with random actions, in {random}."
    )
