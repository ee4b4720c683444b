"""Reference implementation of the Terra world model in plain transformers: the yardstick for every other backend."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration import LlamaActionConfig
from .positions import SpatioTemporalEmbedding


class LlamaActionForCausalLM(LlamaForCausalLM):
    """Llama decoder that predicts image tokens from earlier image tokens and projected actions."""

    config_class = LlamaActionConfig
    config: LlamaActionConfig

    def __init__(self, config: LlamaActionConfig) -> None:
        super().__init__(config)
        if config.pad_token_id is None:
            raise ValueError("pad_token_id must be set: it marks the action positions in input_ids.")
        self.placeholder_id = config.pad_token_id
        self.pos_embedding_spatio_temporal = SpatioTemporalEmbedding(config)
        self.action_projection = nn.Linear(config.action_dim, config.hidden_size)
        self.post_init()

    def embed(self, input_ids: Tensor, actions: Tensor | None, position_ids: Tensor) -> Tensor:
        """Embed tokens and actions and add their positions.

        Args:
            input_ids: int64 (batch, length); ``pad_token_id`` at every action position.
            actions: float (num_items, num_action_tokens, action_dim), in the order of the action positions read row
                by row; None where there are none.
            position_ids: int64 (batch or 1, length).

        Returns:
            Float (batch, length, hidden).
        """
        embeddings: Tensor = self.model.embed_tokens(input_ids)
        is_action = input_ids.eq(self.placeholder_id)
        num_positions = int(is_action.sum())
        num_rows = 0 if actions is None else actions.shape[0] * actions.shape[1]
        if num_positions != num_rows:
            raise ValueError(f"input_ids hold {num_positions} action positions but actions hold {num_rows} rows.")
        if actions is not None:
            rows = self.action_projection(actions.to(embeddings.dtype)).flatten(0, 1)
            embeddings = embeddings.masked_scatter(is_action.unsqueeze(-1), rows)
        positions: Tensor = self.pos_embedding_spatio_temporal(position_ids)
        return embeddings + positions

    def forward(
        self,
        input_ids: Tensor,
        actions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the token after every position.

        Args:
            input_ids: int64 (batch, length); ``pad_token_id`` at every action position.
            actions: float (num_items, num_action_tokens, action_dim); see ``embed``.
            attention_mask: as in ``LlamaForCausalLM``.
            position_ids: int64 (batch or 1, length); by default they continue those in ``past_key_values``.
            past_key_values: the cache of the positions before ``input_ids``.
            labels: int64 (batch, length), -100 where no loss is wanted; shifted inside, as in ``LlamaForCausalLM``.
            use_cache: whether to return ``past_key_values``.
            logits_to_keep: compute logits for the last so many positions only, or for those of an int64 tensor; 0 for
                all.
            **kwargs: passed on to ``LlamaModel``.

        Returns:
            Logits, float (batch, kept positions, vocab), with the loss and the cache where asked for.
        """
        if position_ids is None:
            start = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(start, start + input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        outputs = self.model(
            inputs_embeds=self.embed(input_ids, actions, position_ids),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, positions, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)

    def interleave(self, frames: Tensor) -> Tensor:
        """Lay frames out as the model reads them: the tokens of each frame, then placeholders for its action.

        Args:
            frames: int64 (batch, frames, num_image_patches).

        Returns:
            int64 (batch, frames * num_spatio_embeddings).
        """
        return nn.functional.pad(frames, (0, self.config.num_action_tokens), value=self.placeholder_id).flatten(1)

    @torch.inference_mode()
    def generate_frame(self, input_ids: Tensor, actions: Tensor, cache: Cache) -> Tensor:
        """Generate the next frame greedily; the placeholder id is never chosen.

        Args:
            input_ids: int64 (batch, length), what the cache lacks; ends with the action of the last frame so far.
            actions: float (num_items, num_action_tokens, action_dim), those of ``input_ids``.
            cache: the positions before ``input_ids``. On return it also holds ``input_ids`` and the new frame but
                for its last token, which the next call has to begin with.

        Returns:
            int64 (batch, num_image_patches).
        """
        tokens: list[Tensor] = []
        step_actions: Tensor | None = actions
        for _ in range(self.config.num_image_patches):
            outputs = self(input_ids, step_actions, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = outputs.logits[:, -1]
            logits[:, self.placeholder_id] = -torch.inf
            input_ids = logits.argmax(dim=-1, keepdim=True)
            step_actions = None
            tokens.append(input_ids)
        return torch.cat(tokens, dim=1)

    def rollout(
        self, context_frames: Tensor, actions: Tensor, num_frames: int, *, keep: int | None = None
    ) -> Iterator[Tensor]:
        """Generate frames one after the other, each from its own predecessors and the actions.

        Args:
            context_frames: int64 (batch, context, num_image_patches), at least one frame.
            actions: float (batch, at least context + num_frames - 1, num_action_tokens, action_dim); action i leads
                from frame i to frame i + 1.
            num_frames: frames to generate.
            keep: the frames to go on from when the model is full, as in ``LlamaActionConfig.falling``. None refuses
                more frames than the model holds.

        Yields:
            The next frame, int64 (batch, num_image_patches), as soon as it is complete.
        """
        num_total = context_frames.shape[1] + num_frames
        self.config.falling(num_total - 1, keep)
        if actions.shape[1] < num_total - 1:
            raise ValueError(f"{num_total} frames take {num_total - 1} actions, but only {actions.shape[1]} are given.")
        frames = context_frames
        cache = DynamicCache(config=self.config)
        input_ids = self.interleave(frames)
        step_actions = actions[:, : frames.shape[1]]
        for index in range(frames.shape[1], num_total):
            falling = self.config.falling(frames.shape[1], keep)
            if falling:
                frames = frames[:, falling:]
                cache = DynamicCache(config=self.config)
                input_ids = self.interleave(frames)
                step_actions = actions[:, index - frames.shape[1] : index]
            frame = self.generate_frame(input_ids, step_actions.flatten(0, 1), cache)
            yield frame
            frames = torch.cat((frames, frame[:, None]), dim=1)
            # the cache lacks the frame's last token, and the action after it
            input_ids = self.interleave(frame[:, None])[:, -self.config.num_action_tokens - 1 :]
            step_actions = actions[:, index : index + 1]
