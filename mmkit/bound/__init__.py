"""A modality, bound to one config and tokenizer.

- `intake`: what a caller sends, as canonical items;
- `processing`: canonical items to processed fields;
- `calls`: calls of the Hugging Face processor that some modalities share;
- `placeholders`: what an item becomes in the prompt, evaluated once per geometry and cached;
- `modality`: the modality as a whole;
- `output`: what the model may say, as arrays.
"""
