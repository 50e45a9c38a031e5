"""The routes of the API: a module for each thing to ask about, with its handlers, rows and schemas."""
