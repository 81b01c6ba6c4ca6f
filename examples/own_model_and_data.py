"""Your own model and your own per-client tensors, in five lines."""

import torch

import coterie


def hospitals(number: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Stand-in for your data: one (x, y) pair of tensors a client. Each hospital's threshold differs a little."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(200 + 100 * i, 8, generator=draw) for i in range(number)]
    return [(x, (x[:, 0] + x[:, 1] * x[:, 2] > 0.2 * i).long()) for i, x in enumerate(xs)]


def main() -> coterie.Result:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    result = coterie.run("fedprox", hospitals(), model=model, rounds=10, local_epochs=2, lr=0.1, mu=0.1)
    for row in result.clients:
        print(f"{row['client']}: alone {row['local_test_auroc']:.3f}, gain {row['gain']:+.3f}")
    personal = result.model("client-3")  # your own class, with this client's parameters
    print(personal(torch.zeros(1, 8)).softmax(1))
    return result


if __name__ == "__main__":
    main()
