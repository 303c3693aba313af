"""Run by every Python process of the server: lets torchvision be imported beside a CPU build of torch.

torchvision's compiled operators cannot load there, but importing it (which transformers and SGLang do for models that
see no image) asks for two of them by name. Defining them, without an implementation, is enough.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class _DefineOperatorsFirst(importlib.abc.MetaPathFinder):
    """Defines torchvision's operators just before torchvision is first imported."""

    _library: object = None

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision" and self._library is None:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            type(self)._library = library
        return None


sys.meta_path.insert(0, _DefineOperatorsFirst())
