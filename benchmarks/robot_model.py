"""The model of `benchmarks.robots`: a prompt of which most is fixed, a state, and one picture."""

from mmkit import Policy, insert, literal, tok
from tests.night.robot import ROBOT, RobotPolicy

FIXED_PROMPT = "The arm has seven joints and a gripper. It stands at the edge of a table. " * 4
"""What stands before all that differs. The tiny tokenizer has a token for each character."""

AFTER_FIXED_PROMPT = insert(after=literal(tok["<s>"], tok.text(FIXED_PROMPT)))

ARM = ROBOT.model_copy(
    update={
        "name": "arm",
        "modalities": [
            ROBOT["state"].model_copy(update={"update": AFTER_FIXED_PROMPT}),
            ROBOT["image"],
        ],
        "policy": Policy(
            "chunk",
            {"image": "observation/image", "state": "observation/state"},
            prompt=FIXED_PROMPT + "<image>{prompt}",
        ),
    }
)


@ARM.register
class ArmPolicy(RobotPolicy):
    """The robot's model, with this spec."""
