import subprocess
import sys

from coterie.deploy import processes


def test_the_process_of_a_message_does_not_import_torch():
    code = "import sys; from coterie.flower import client_app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=processes.environment(), check=False).returncode == 0
