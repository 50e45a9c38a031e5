"""What is read from the log's files here, without taking anything: messages, histories, dead letters."""
