"""What a message is and what may become of it. No IO; time is an argument."""
