"""One browser and one run serve all tests. The run trains while the live page is looked at, and is
finished when its report is."""

import browser
import pytest
import small


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    started = browser.start(tmp_path_factory.mktemp("browser"))
    yield started
    started.quit()


@pytest.fixture(scope="session")
def training(tmp_path_factory):
    """(process, folder) of a run."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    changes = {"iterations": "21", "checkpoint__every": "3", "eval__images": "16"}
    with small.start("train", *small.words(folder, reward="shapes", **changes)) as process:
        yield process, folder
        process.kill()


@pytest.fixture(scope="session")
def trained(training):
    process, folder = training
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    return folder
