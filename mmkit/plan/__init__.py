"""A spec bound to one config and tokenizer: what requests run through.

- `plan`: the plan as a whole, and its methods for requests;
- `modality`: a modality, bound;
- `parsing`: what a caller sends, as canonical items;
- `processing`: canonical items to processed fields;
- `hf_calls`: calls of the Hugging Face processor that some modalities share;
- `layouts`: what an item becomes in the prompt, evaluated once per geometry and cached;
- `placement`: where the layouts of all items stand in the prompt;
- `rehearsal`: the checks that run a spec on items before the first request;
- `output`: what the model may say, as arrays.
"""
