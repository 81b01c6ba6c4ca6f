import coterie
from tests.cli.commands import cli


def test_version():
    assert cli("--version").output.strip() == f"coterie {coterie.__version__}"
