"""Registration of models of transformers with vLLM.

It imports neither vLLM's models nor the author's class, so that a plugin can call it in every
process.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import SpecError
from ..generate import name_model_module
from ..language.spec import find_calling_module
from ..plugin import announce, claim_architecture, find_registered_module, is_of_script


def serve_transformers(model: str | type, config: Any = None) -> None:
    """Register a model of transformers with vLLM, which then serves the class that was trained.

    The class is a causal language model of transformers with `mmkit.training.MultiModalMixin`, its
    `mm_spec` and an ``embed_<modality>`` for each modality. Its name is the architecture in the
    checkpoint's config. vLLM's Transformers modeling backend runs it, `forward` included;
    `mmkit.MultiModalModel` adds the processor and the checks of the spec.

    Call it in the plugin of your package (an entry point of ``vllm.general_plugins``), which vLLM
    runs in every process, or in a script. It can be called again.

    >>> def register():
    ...     mmkit.serve_transformers("pulse.model:PulseForCausalLM", PulseConfig)

    Args:
        model: ``package.module:Class``, which is imported only where the model runs; or the class.
        config: the class of its config, registered with `AutoConfig` for its `model_type`. None
            for a config that transformers has.

    Raises:
        SpecError: the name is no ``package.module:Class``, or another package has registered a
            class of the same name.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    if isinstance(model, str):
        home, _, name = model.partition(":")
    else:
        home, name = model.__module__, model.__qualname__
    if not home or not name.isidentifier():
        expected = "package.module:Class, or a class at the top of a module"
        raise SpecError("serve_transformers", expected, f"{home}:{name}")
    if config is not None:
        AutoConfig.register(config.model_type, config, exist_ok=True)
    module = name_model_module(home, name)
    registered = find_registered_module(ModelRegistry.models.get(name))
    claim_architecture(name, module, registered)
    if is_of_script(module):  # no other process can import the class by its name
        importlib.import_module(module)
        return
    if registered != module:
        ModelRegistry.register_model(name, f"{module}:{name}")
    announce(find_calling_module())
