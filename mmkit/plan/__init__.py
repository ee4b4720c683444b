"""A spec bound to one config and tokenizer: what requests run through.

- `bind`: a spec becomes a complete, frozen plan;
- `plan`: the plan as a whole, and its methods for requests;
- `modality`: a modality, bound;
- `guard`: the placeholder ids, against which prompts and samples are guarded;
- `parsing`: what a caller sends, as canonical items;
- `processing`: canonical items to processed fields;
- `hf_calls`: calls of the Hugging Face processor that some modalities share;
- `item`: one item of a request, which each step fills in further;
- `scopes`: the scopes in which expressions are evaluated for one item;
- `forms`: what the fields of all items have in common;
- `layouts`: what an item becomes in the prompt, evaluated once per geometry and cached;
- `largest`: the largest item, for which vLLM reserves memory;
- `placement`, `merging`, `text_targets`: where the layouts of all items stand in the prompt;
- `rehearsal`: the checks that run a spec on items before the first request;
- `outline`: what follows from the facts of items alone, for routers and planners;
- `files`: files of images and audio, as vLLM's loaders take them;
- `hashes`: the keys by which vLLM's caches know items;
- `memo`: what a frozen plan may still learn;
- `encoder_rows`, `soundness`: the rows that encoders make and callers send;
- `containment`: rows that a language model cannot carry become zeros;
- `output`: what the model may say, as arrays;
- `allowed_ids`: the ids that may be sampled;
- `mrope`: positions of time, height and width;
- `model_methods`: what a model class must have.
"""
