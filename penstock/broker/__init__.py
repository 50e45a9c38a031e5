"""Who gets what: ports, consumers, requests, hand-out. No IO; time is an argument."""
