"""`penstock token new NAME`: a token for a user, and what the broker's settings must know of it.

The token is printed once and kept nowhere: the settings have its hash. It asks no broker for anything.
"""

import argparse
import json

from penstock.common.kinds import NAME, WrongValue
from penstock.common.tokens import hash_token, new_token
from penstock.errors import Misuse

HELP = "make a token for a user, and the lines of settings that make it known"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("act", choices=("new",), help="what to do: make a new one")
    parser.add_argument("name", metavar="NAME", help="the user whose token it is: a [[user]] of the settings")
    parser.add_argument("--json", action="store_true", help="an object with user, token and token-hash")


def run(args: argparse.Namespace) -> int:
    try:
        NAME.check(args.name)
    except WrongValue as error:
        raise Misuse(f"NAME: {error}") from None
    token = new_token(args.name)
    hashed = hash_token(token)
    if args.json:
        print(json.dumps({"user": args.name, "token": token, "token-hash": hashed}))
        return 0
    print(f"""{token}

This is the token; it is not shown again, and kept nowhere. Commands take it by --token-file FILE or
PENSTOCK_TOKEN. In the broker's settings, which know its hash only (then `kill -HUP`, or restart):

[[user]]
name = "{args.name}"
token-hash = "{hashed}"
rights = [{{queues = "*", may = ["send", "receive", "read"]}}]

To change a token, let token-hash be a list of the old and the new one for as long as both are in use.""")
    return 0
