"""Which devices this machine's PyTorch can use: a line of JSON for the doctor.

A process of its own, because it loads PyTorch and the driver.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    import torch

    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    print(
        json.dumps(
            {
                "gpus": [[each.name, each.total_memory] for each in gpus],
                "mps": torch.backends.mps.is_available(),
            }
        ),
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
