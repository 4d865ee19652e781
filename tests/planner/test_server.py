from __future__ import annotations

import http.client
import json
import re
import threading
from importlib import resources

import pytest

from sluice._base.errors import InputError
from sluice.planner.question import LIMITS
from sluice.planner.server import PlannerServer

PLAN = "/plan?dataset_size=60000&batch_size=1024&releases=100&delta=1e-5&noise_multiplier=2"


@pytest.fixture
def server():
    with PlannerServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def test_it_answers_with_what_the_library_computes(server):
    response, content = ask(server, PLAN)
    assert response.status == 200
    assert 0.3 < float(json.loads(content)["epsilon"]) < 1


def test_it_serves_its_page_and_nothing_else(server):
    for path in ("/", "/planner.css", "/planner.js"):
        response, content = ask(server, path)
        assert response.status == 200
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert content
    for path in ("/page/planner.html", "/../question.py", "//planner.js/..", "/etc/passwd", "/server.py"):
        assert ask(server, path)[0].status == 404


def test_other_names_are_not_answered(server):
    # A page whose host name is made to point to the loopback address sends its own name.
    assert ask(server, PLAN, Host="attacker.example")[0].status == 403
    assert ask(server, PLAN, Host=f"localhost:{server.server_port}")[0].status == 200


@pytest.mark.parametrize("query", ["", "dataset_size=1", PLAN[6:] + "&delta=1e-6", "x" * 5000, PLAN[6:] + "&gate=%00"])
def test_bad_input_gets_a_sentence(server, query):
    response, content = ask(server, f"/plan?{query}")
    assert response.status == 400
    assert json.loads(content)["error"].endswith(".")


def test_it_listens_on_the_loopback_address_alone(server):
    assert server.server_address[0] == "127.0.0.1"


def test_a_port_in_use_is_refused(server):
    with pytest.raises(InputError, match="Choose another"):
        PlannerServer(port=server.server_port)
    with pytest.raises(InputError, match="from 0 to 65535"):
        PlannerServer(port=70000)


def test_the_page_fetches_nothing_from_outside_and_stays_within_the_limits():
    page = resources.files("sluice.planner").joinpath("page")
    texts = {each.name: each.read_text("utf-8") for each in page.iterdir()}
    assert not [name for name, text in texts.items() if re.search(r"https?://|//\w+\.", text)]
    sliders = re.findall(r'name: "(\w+)".*?low: ([-\d.e]+), high: ([-\d.e]+)', texts["planner.js"])
    assert {name for name, _, _ in sliders} == set(LIMITS)
    for name, low, high in sliders:
        assert LIMITS[name][0] <= float(low) < float(high) <= LIMITS[name][1]
