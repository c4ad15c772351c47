"""torchvision has no CPU build here: declare the operators its import registers, then import it."""

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


_keep: list = []
sys.meta_path.insert(0, _DeclareTorchvisionOps())
