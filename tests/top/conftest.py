"""The brokers of the tests of the HTTP API, for what shows them."""

from tests.http.conftest import api as api
from tests.http.conftest import broker as broker
from tests.http.conftest import start_broker as start_broker
