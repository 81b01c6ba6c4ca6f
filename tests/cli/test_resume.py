from tests.cli.commands import cli


def test_resume_of_a_complete_run_shows_the_same_result(finished):
    out, first = finished
    again = cli("resume", out)
    assert again.exit_code == 0
    assert "fedmap: all 1 rounds are already done" in again.output
    assert again.output.endswith(first.output[first.output.index("Test balanced accuracy") :])
