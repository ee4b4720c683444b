"""The multimodal side of Terra: one action per frame, six positions of the prompt each, and a frame that comes out."""

from mmkit import Modality, ModelSpec, Output, Tensor, already_expanded, any_id, batched, cfg

from .frames import decode_frame, encode_frame

TERRA = ModelSpec(
    "terra",
    Modality(
        "actions",
        # six future waypoints (x, y, t) after every frame; the bound keeps
        # them in the range of any dtype of the model
        item=Tensor(
            shape=(cfg.num_action_tokens, cfg.action_dim),
            bound=1000.0,
        ),
        # pad is a reserved id inside the vocabulary; prompts have it at every
        # position of an action
        placeholder=cfg.pad_token_id,
        tokens=cfg.num_action_tokens,
        update=already_expanded(),
        fields={
            "actions": batched(
                shape=(cfg.num_action_tokens, cfg.action_dim),
                dtype="float32",
            ),
        },
        # the last frame has no action
        limit=cfg.num_temporal_embeddings - 1,
    ),
    outputs=[
        # what the model generates after an action: the image tokens of the
        # next frame, and never pad
        Output(
            "frame",
            any_id(0, cfg.pad_token_id) * cfg.num_image_patches,
            decode_frame,
            encode_frame,
            # camera frames go through a learned tokenizer
            lossy=True,
        ),
    ],
)
