"""Names shared by the chart's MutatingWebhookConfiguration and both programs.

IMPORTANT: `failurePolicy: Fail` is safe only because the chart's matchConditions exclude every workload without
annotations. They use CEL's optional types: `object.metadata.annotations['...']` is an *error* on an object without
annotations, and under Fail an error blocks the request, and with it the whole cluster.
"""

CONFIGURATION = "deltashard-webhook"
TIMEOUT_S = 5
PATH = "/mutate"
