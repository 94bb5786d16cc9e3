"""The Kubernetes operator: Model, InferenceService and TrainJob objects become Deployments, Services, Jobs and Pods."""
