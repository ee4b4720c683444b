"""The multimodal side of Terratorch's models: pixels and coordinates, and no position in the prompt."""

from mmkit import Modality, ModelSpec, Record, Tensor, batched, cfg

TERRATORCH_LIKE = ModelSpec(
    "terratorch_like",
    Modality(
        "image",
        # callers send {"pixel_values": ..., "location_coords": ...}; each part is the field of its name
        item=Record(
            pixel_values=Tensor((cfg.bands, cfg.image_size, cfg.image_size)),
            location_coords=Tensor((2,), bound=180.0),
        ),
        fields={"pixel_values": batched(), "location_coords": batched()},
        # the model's forward gets the fields; nothing stands for an image in the prompt
        tokens=0,
    ),
)
