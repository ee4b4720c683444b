"""The spec of one model: a declaration that binds, generates and registers itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import torch

from .generate import Classes, generate_classes
from .language.spec import Declaration, find_calling_module
from .plan.bind import bind
from .plan.plan import Plan
from .plugin import announce

if TYPE_CHECKING:
    from .training import Processor

M = TypeVar("M", bound=type)


class ModelSpec(Declaration, init=False):
    """The multimodal side of one model: its name in messages and class names, and its modalities.

    Two specs are equal if they declare the same; a spec can be printed and hashed.

    Attributes:
        name: the model's name in messages and class names.
        modalities: its modalities.
        prompt: how mmkit rewrites every prompt, with or without items, before it places items:
            `ending_with`, ids that take its place, or a function of a `Scope` to token ids. None
            leaves prompts as they are. A prompt may come back expanded, so the function must leave
            its own result unchanged.
        decoder_prompt: for an encoder-decoder model, whose items go into the encoder's prompt: the
            same for the decoder's prompt; ``ending_with()`` is the caller's prompt itself.
        tokenization_kwargs: how texts are tokenized, unless a request says otherwise:
            ``{"add_special_tokens": False}``. Before vLLM 0.17 this concerns texts with items only.
        merges: a character whose runs are tokens, for example a line break. In a prompt with items,
            each run of it becomes the tokens that the tokenizer makes of it, also where it reaches
            across the edge of a layout, as in a text that is tokenized as a whole.
        outputs: the model's outputs other than text; or a function of a `Scope` that returns them,
            where the config says which there are.
        policy: how a robot drives the model; None if no robot drives it.
    """

    def bind(
        self,
        config: Any,
        tokenizer: Any = None,
        *,
        processor: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Plan:
        """Bind the spec to a config and a tokenizer.

        Requests run through the returned plan. Binding needs neither vLLM nor an engine.

        Args:
            config: the Hugging Face config of the model.
            tokenizer: its tokenizer; None for a model that runs without one.
            processor: its Hugging Face processor, for specs that use `proc` or `hf()`.
            kwargs: `mm_processor_kwargs` of every request.
            dtype: the model's, in which a server has the floats of Hugging Face processors; None
                leaves them as they are.

        Raises:
            SpecError: the first thing that cannot work, for example an attribute that the config
                lacks, a token that the vocabulary lacks, an id outside the vocabulary, a shape or
                limit out of range, or an item without placeholders. It names the modality, the
                part, and the remedy.
        """
        return bind(self, config, tokenizer, processor, kwargs, dtype=dtype)

    @property
    def classes(self) -> Classes:
        """The generated vLLM classes: `info`, `dummy_inputs`, `processor`.

        The first use generates them and needs vLLM. They are ordinary classes, importable from
        ``mmkit.generated.<module of the spec>.<its variable>``, and open to subclassing.

        Raises:
            VllmApiError: the installed vLLM has none of the interfaces that mmkit knows.
        """
        return Classes(*generate_classes(self, "vllm_api"))

    @property
    def hf_processor_class(self) -> type:
        """The generated processor for transformers, a subclass of `mmkit.training.Processor`.

        It needs transformers and no vLLM.

        Use it in ``AutoProcessor.register(Config, SPEC.hf_processor_class)``, or call its
        `from_pretrained` on any checkpoint of the model. It is importable like `classes`, below
        ``mmkit.training.generated``.
        """
        return generate_classes(self, "training")[0]

    def hf_processor(
        self,
        config: Any,
        tokenizer: Any = None,
        *,
        processor: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> Processor:
        """Make a processor of transformers for this spec.

        It turns prompts and items into the tensors that a model is trained on, by the code that
        vLLM's path runs, and needs no vLLM.

        Args:
            config: the Hugging Face config of the model.
            tokenizer: its tokenizer; None for a model that runs without one.
            processor: its Hugging Face processor, for specs that use `proc` or `hf()`.
            kwargs: `mm_processor_kwargs` of every call, the same as the server's.
            dtype: the model's, in which a server has the floats of Hugging Face processors; None
                takes the dtype that the config states, if it states one.

        Raises:
            SpecError: as for `bind`.
        """
        processor_class: Any = self.hf_processor_class
        hf_processor: Processor = processor_class(
            config, tokenizer, hf_processor=processor, mm_processor_kwargs=kwargs, dtype=dtype
        )
        return hf_processor

    def to_document(
        self, *, functions: Mapping[str, Callable[..., Any]] | None = None
    ) -> dict[str, Any]:
        """Return the spec as a document: an object of JSON, from which `from_document` makes it.

        Functions are in it by their names, as ``package.module:function``. It needs pydantic.

        Args:
            functions: names for functions that no process can import, for example local ones.

        Raises:
            SpecError: a part that no document can hold.
        """
        from .document import to_document

        return to_document(self, functions=functions)

    @classmethod
    def from_document(
        cls,
        document: str | bytes | Mapping[str, Any],
        *,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        import_functions: bool = False,
    ) -> Self:
        """Return the spec of a document.

        A document that names no functions runs no code. It needs pydantic.

        Args:
            document: JSON, or the object that it holds.
            functions: the functions that the document may name.
            import_functions: import other functions that it names, which runs the code of their
                modules.

        Raises:
            SpecError: the document is malformed, its spec cannot work, or it names a function that
                is neither passed nor imported.
        """
        from .document import from_document

        return from_document(document, cls, functions=functions, import_functions=import_functions)

    @overload
    def register(
        self,
        model: M,
        *,
        info: type | None = None,
        dummy_inputs: type | None = None,
        processor: type | None = None,
    ) -> M: ...

    @overload
    def register(
        self,
        *,
        info: type | None = None,
        dummy_inputs: type | None = None,
        processor: type | None = None,
    ) -> Callable[[M], M]: ...

    def register(
        self,
        model: type | None = None,
        *,
        info: type | None = None,
        dummy_inputs: type | None = None,
        processor: type | None = None,
    ) -> Any:
        """Register the generated classes, and the model class itself, with vLLM.

        Use it as a decorator of the model class.

        Spawned processes (engine core, workers, the registry's inspection) register the class too:
        `register` adds the calling module to the environment variable MMKIT_MODULES, and mmkit's
        plugin imports these modules in each process.

        Args:
            model: the model class, your own or one of vLLM's; its `__name__` is the architecture in
                the checkpoint's config.
            info: a subclass of the generated class, registered in its place.
            dummy_inputs: likewise.
            processor: likewise.

        Returns:
            The model class; without one, a decorator.

        Raises:
            SpecError: the class cannot run the spec; see `mmkit.model.registration.check_class`.
            VllmApiError: the installed vLLM has none of the interfaces that mmkit knows.
        """
        if model is None:

            def decorate(decorated: type) -> Any:
                return self.register(
                    decorated, info=info, dummy_inputs=dummy_inputs, processor=processor
                )

            return decorate
        from .model.registration import register_class

        register_class(self, model, info=info, dummy_inputs=dummy_inputs, processor=processor)
        announce(find_calling_module())
        return model
