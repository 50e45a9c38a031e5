"""The domain: message life, queue state, consumers, policies. No IO; time is an argument."""
