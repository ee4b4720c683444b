"""A robot's policy of random weights: two cameras, a state and an instruction in, a chunk of eight actions out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from examples.llava_like.model import LlavaLikeForConditionalGeneration
from examples.vla import checkpoint as vla
from examples.vla.spec import VLA, decode_action
from mmkit import Modality, Output, Policy, Scope, Tensor, any_id, batched, cfg, concat, insert

STEPS = 8
DIMENSIONS = 7
STATE_SIZE = 8
PROMPTS = ("pick up the can", "open the drawer", "push the cube left")

FIRST_PADDING_ID = cfg.text_config.vocab_size - cfg.pad_to_multiple_of


def decode_chunk(ids: np.ndarray[Any, Any], scope: Scope) -> np.ndarray[Any, Any]:
    """Return the actions of ids, int64 (steps * dimensions,), as float64 (steps, dimensions)."""
    return decode_action(ids.reshape(STEPS, DIMENSIONS), scope)


ROBOT = VLA.model_copy(
    update={
        "name": "robot",
        "modalities": [
            Modality(
                "state",
                item=Tensor((STATE_SIZE,)),
                placeholder=FIRST_PADDING_ID,
                tokens=1,
                update=insert(at="start"),
                fields={"state": batched()},
                limit=1,
            ),
            *VLA.modalities,
        ],
        "outputs": [
            *VLA.outputs,
            Output(
                "chunk",
                any_id(FIRST_PADDING_ID - cfg.n_action_bins, FIRST_PADDING_ID) * (STEPS * DIMENSIONS),
                decode_chunk,
            ),
        ],
        "policy": Policy(
            "chunk",
            {
                "image": ["observation/image", "observation/wrist_image"],
                "state": concat("observation/joint_position", "observation/gripper_position"),
            },
            prompt="<image><image>{prompt}",
            ignored=["observation/exterior_image_2_left"],
            metadata={"reset_pose": [0.0] * DIMENSIONS},
        ),
    }
)


@ROBOT.register
class RobotPolicy(LlavaLikeForConditionalGeneration):
    """LLaVA with a projector for the state."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        with self._mark_tower_model(vllm_config, "state"):
            self.state_projector = nn.Linear(STATE_SIZE, self.config.text_config.hidden_size)

    def embed_state(self, state: torch.Tensor) -> torch.Tensor:
        """Project states (items, 8) to rows (items, 1, hidden_size)."""
        return self.state_projector(state.to(self.state_projector.weight.dtype))[:, None]


def make_checkpoint(folder: Path) -> Path:
    """Write config, weights, tokenizer and image processor; the folder is made if it does not exist."""
    vla.make_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [RobotPolicy.__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    hidden_size = config["text_config"]["hidden_size"]
    weights["state_projector.weight"] = torch.randn(hidden_size, STATE_SIZE, generator=generator) * 0.5
    weights["state_projector.bias"] = torch.zeros(hidden_size)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_observations(count: int, num_pictures: int = 50, seed: int = 0) -> list[dict[str, Any]]:
    """Return observations of two cameras of 224 x 224 pixels, all different: pictures come again with another state."""
    generator = np.random.default_rng(seed)
    pictures = [draw_scene(generator) for _ in range(num_pictures)]
    observations = []
    for number in range(count):
        observations.append(
            {
                "observation/image": pictures[number % num_pictures],
                "observation/wrist_image": pictures[generator.integers(num_pictures)],
                "observation/joint_position": generator.normal(size=STATE_SIZE - 1),
                "observation/gripper_position": generator.random(1),
                "prompt": PROMPTS[number % len(PROMPTS)],
            }
        )
    return observations


def draw_scene(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return a picture of rectangles, uint8 (224, 224, 3)."""
    picture = np.full((224, 224, 3), generator.integers(0, 256, 3), np.uint8)
    for _ in range(6):
        top, left = generator.integers(0, 160, 2)
        height, width = generator.integers(20, 120, 2)
        picture[top : top + height, left : left + width] = generator.integers(0, 256, 3)
    return picture
