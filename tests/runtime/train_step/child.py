"""Two training steps in a process of their own; prints as JSON what the caches, the verdict and the passes did."""

from __future__ import annotations

import json

import torch
from torch import nn
from torch._dynamo.utils import counters

from fusewright.runtime.step_verify import StepVerifier
from fusewright.runtime.train_step import TrainStep
from tests.runtime.train_step.step_pair import adamw, square


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    compared: list[StepVerifier] = []
    init = StepVerifier.__init__

    def counted(self: StepVerifier, *args: object) -> None:
        compared.append(self)
        init(self, *args)  # type: ignore[arg-type]

    StepVerifier.__init__ = counted  # type: ignore[method-assign, assignment]
    step = TrainStep(model, square, adamw()(model.parameters()), strict=True)
    losses = [step(torch.ones(5, 4)).item() for _ in range(2)]
    report = step.report()
    print(
        json.dumps(
            {
                "losses": losses,
                "weight": model.weight.detach().flatten()[:4].tolist(),
                "compared": len(compared),
                "compiled_calls": report["compiled_calls"],
                "verified": report["graphs"][0]["verified"],
                "fallbacks": report["fallbacks"],
                "aot": counters["aot_autograd"],
                "inductor": counters["inductor"],
            }
        )
    )


if __name__ == "__main__":
    main()
