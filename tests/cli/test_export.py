import torch

from tests.cli.commands import cli


def test_export(run):
    told = cli("export", run, "--client", "2", "--format", "safetensors")
    assert "Wrote the model of site-2 to site-2.safetensors and site-2.safetensors.json" in told.output
    told = cli("export", run, "--client", "2", "--probabilities", "-o", "m.pt2")
    assert "Wrote the model of site-2 to m.pt2" in told.output
    program = torch.export.load("m.pt2").module()
    assert torch.allclose(program(torch.zeros(3, 4)).sum(1), torch.ones(3))
