"""Every op case in every mode, against CPU torch."""

import pytest

from tests.support import Case, check, load_cases, run

MODES = ["eager"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", load_cases(), ids=str)
def test_agrees_with_torch(case: Case, mode: str) -> None:
    if case.error is not None:
        with pytest.raises(case.error, match=case.match):
            run(case, mode)
        return
    check(case, run(case, mode))
