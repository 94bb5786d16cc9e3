"""Training that survives the loss of any process: failures are detected, answered, and the run resumes."""
