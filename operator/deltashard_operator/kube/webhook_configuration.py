"""What the chart's MutatingWebhookConfiguration and the two programs must agree on. The chart has the objects.

IMPORTANT: `failurePolicy: Fail` is bearable only because the chart's matchConditions keep every workload that is not
annotated from reaching the webhook at all. They use CEL's optional types: `object.metadata.annotations['...']` is an
*error* on an object without annotations, and under Fail an error blocks it, and with it the whole cluster.
"""

CONFIGURATION = "deltashard-webhook"
TIMEOUT_S = 5
PATH = "/mutate"
