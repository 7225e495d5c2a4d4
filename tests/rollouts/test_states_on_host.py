"""States of rollouts in host memory: rows are fetched to the device that asks for them."""

import far
import torch
from far import Away

from flowrl.samplers import plan, tree

SIGMAS = torch.linspace(1, 0, 5, dtype=torch.float64)


def grown(host, device="cpu"):
    place = far.far if device != "cpu" else lambda value: value

    def noise(keys):
        return place(torch.stack([torch.full((2,), float(key % 97)) for key in keys.tolist()]))

    path = plan.window(SIGMAS, start=1, size=2, eta=0.7)
    rows = torch.zeros(3, dtype=torch.int64)
    return tree.grow(lambda x, sigma, rows: x * 0.5, noise, path, shape=(2,), rows=rows, host=host)


def test_states_are_kept_on_the_host_and_fetched_by_rows_of_the_device():
    plain = grown(False)
    with Away():
        made = grown(True, far.DEVICE)
        assert made.states.device.type == "cpu" and made.src.device == far.DEVICE
        assert torch.equal(made.states, plain.states)
        for rows, wanted in ((made.src, plain.src), (made.leaf, plain.leaf)):
            fetched = made.at(rows)
            assert fetched.device == far.DEVICE
            assert torch.equal(far.near(fetched), plain.at(wanted))
        assert torch.equal(far.near(made.log_prob), plain.log_prob)
        assert torch.equal(made.leaves, plain.leaves)
