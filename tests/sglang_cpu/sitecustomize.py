"""Stand-ins without which SGLang does not run on this CPU.

- torchvision has no CPU build here: declare the operators its import registers, then import it.
- SGLang pins memory for adapters, which needs a GPU: allocate plain memory.
"""

import importlib.abc
import sys


class _DeclareTorchvisionOps(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                self.library.define(
                    f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            _keep.append(self.library)
        return None


class _PinNothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "sglang.srt.lora":
            sys.meta_path.remove(self)
            import torch

            for create in ("tensor", "empty", "zeros", "ones", "full"):
                setattr(torch, create, _without_pinning(getattr(torch, create)))
            torch.Tensor.pin_memory = lambda tensor, *_: tensor
        return None


def _without_pinning(create):
    return lambda *args, pin_memory=False, **options: create(*args, **options)


_keep: list = []
sys.meta_path[:0] = [_DeclareTorchvisionOps(), _PinNothing()]
