{{/* What the API server does by itself; the same as deltashard_operator/kube/webhook_configuration.py, which a test compares. */}}

{{- define "deltashard.admission.selector" -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values:
      - kube-system
      - {{ .Release.Namespace }}
      {{- range .Values.webhook.exemptNamespaces }}
      - {{ . }}
      {{- end }}
{{- end }}

{{- define "deltashard.admission.webhook" -}}
admissionReviewVersions: [v1]
clientConfig:
  # caBundle is the controller's or cert-manager's to write; a field that no version of the manifest has is left alone
  # by every upgrade.
  {{- if eq .Values.certificates.mode "existing" }}
  caBundle: {{ required "certificates.existing.webhookCa is needed in mode existing" .Values.certificates.existing.webhookCa | b64enc }}
  {{- end }}
  service:
    name: deltashard-webhook
    namespace: {{ .Release.Namespace }}
    path: /mutate
    port: 443
failurePolicy: {{ .Values.webhook.failurePolicy }}
matchPolicy: Equivalent
namespaceSelector: {{- include "deltashard.admission.selector" . | nindent 2 }}
reinvocationPolicy: IfNeeded
sideEffects: None
timeoutSeconds: 5
{{- end }}
