"""Let torchvision's CUDA build be imported beside a CPU build of torch.

fix_cpu_environment.py puts this module into site-packages, and a `.pth` file that imports
it at interpreter start; `pip show -f mmkit-torchvision-fix` lists both and
`pip uninstall mmkit-torchvision-fix` removes them.

On import, torchvision registers fake kernels for two operators of its native library,
which fails where the library did not load. Once torchvision has tried to load it, in vain,
this declares these two: torchvision's transforms then work; its native operators still say
that they are missing. Where the library loads, in a true CPU build, nothing is declared.

Nothing is imported up here but sys: every interpreter of the environment runs it.
"""

import sys


class _Extension:
    """Finds the module in which torchvision loads its native library, and nothing else."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision.extension":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            if not module._has_ops():
                _declare_operators()

        spec.loader.exec_module = exec_module  # of this one loader
        return spec


def _declare_operators():
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


sys.meta_path.insert(0, _Extension)
