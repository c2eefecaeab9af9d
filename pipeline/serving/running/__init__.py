"""What turns a launch plan into running servers, measures them under load and reads what they say."""
