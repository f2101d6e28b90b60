{{/* Admission by the API server. Must match deltashard_operator/kube/webhook_configuration.py; a test compares them. */}}

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
  {{- with .Values.webhook.namespaceSelector.matchExpressions }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- range $key, $value := .Values.webhook.namespaceSelector.matchLabels }}
  - {key: {{ $key | quote }}, operator: In, values: [{{ $value | quote }}]}
  {{- end }}
{{- end }}

{{/* Namespaces whose workloads are sent to the webhook. Without admission policies the webhook rejects workloads elsewhere. */}}
{{- define "deltashard.admission.watched" -}}
{{- $left := concat (list "kube-system" .Release.Namespace) .Values.webhook.exemptNamespaces }}
{{- range .Values.watchNamespaces }}
{{- if has . $left }}
{{- fail (printf "watchNamespaces has %s, which is exempt (webhook.exemptNamespaces, kube-system and the release's namespace): remove it from one of them" .) }}
{{- end }}
{{- end }}
{{- include "deltashard.admission.selector" . }}
{{- if and .Values.watchNamespaces (include "deltashard.hasPolicies" .) }}
  - key: kubernetes.io/metadata.name
    operator: In
    values: {{- toYaml .Values.watchNamespaces | nindent 6 }}
{{- end }}
{{- end }}

{{- define "deltashard.admission.webhook" -}}
admissionReviewVersions: [v1]
clientConfig:
  # caBundle is written by the controller or cert-manager; an upgrade does not touch a field that no version of the
  # manifest has.
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
namespaceSelector: {{- include "deltashard.admission.watched" . | nindent 2 }}
reinvocationPolicy: IfNeeded
sideEffects: None
timeoutSeconds: {{ .Values.webhook.timeoutSeconds }}
{{- end }}
