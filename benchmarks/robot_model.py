"""The model of `benchmarks.robots`: a prompt of which most is fixed, a state, and one picture."""

from mmkit import Modality, Policy, Tensor, batched, insert, literal, tok
from tests.night.robot import FIRST_PADDING_ID, ROBOT, STATE_SIZE, RobotPolicy

FIXED_PROMPT = "The arm has seven joints and a gripper. It stands at the edge of a table. " * 4
"""What stands before all that differs. The tiny tokenizer has a token for each character."""

ARM = ROBOT.model_copy(
    update={
        "name": "arm",
        "modalities": [
            Modality(
                "state",
                item=Tensor((STATE_SIZE,)),
                placeholder=FIRST_PADDING_ID,
                tokens=1,
                update=insert(after=literal(tok["<s>"], tok.text(FIXED_PROMPT))),
                fields={"state": batched()},
                limit=1,
            ),
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
