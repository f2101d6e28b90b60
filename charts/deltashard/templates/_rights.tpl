{{/*
Rights in the watched namespaces; takes a dict of `root`, `component` and `rules` (text). All namespaces: rules of the
component's ClusterRole, by `deltashard.rights.everywhere`; a list: a Role and its binding in each namespace.
*/}}

{{- define "deltashard.rights.everywhere" -}}
{{- if not .root.Values.watchNamespaces }}
{{- .rules }}
- apiGroups: [deltashard.io]
  resources: [clustercheckpointpolicies]
  verbs: [get, list, watch]
{{- if eq .component "controller" }}
- apiGroups: [deltashard.io]
  resources: [clustercheckpointpolicies/status]
  verbs: [patch]
{{- end }}
{{- end }}
{{- end }}

{{- define "deltashard.rights.listed" -}}
{{- $labels := include "deltashard.labels" (dict "root" .root "component" .component) }}
{{- $name := printf "deltashard-%s" .component }}
{{- range .root.Values.watchNamespaces }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ . }}
  labels: {{- $labels | nindent 4 }}
rules: {{- $.rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ . }}
  labels: {{- $labels | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: {{ include "deltashard.account" $ }}
    namespace: {{ $.root.Release.Namespace }}
{{- end }}
{{- end }}

{{- define "deltashard.controller.rules" -}}
{{- if .Values.reclaim.enabled }}
# Removal of finished runs' checkpoints by Jobs.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [create]
{{- end }}
{{- if .Values.controller.annotatePods }}
# Annotation of pods with the time of the newest checkpoint.
- apiGroups: [""]
  resources: [pods]
  verbs: [patch]
{{- end }}
# Watched objects, read-only.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [deltashard.io]
  resources: [checkpointpolicies]
  verbs: [get, list, watch]
# Objects that the controller writes.
- apiGroups: [deltashard.io]
  resources: [checkpointruns]
  verbs: [get, list, watch, create, delete]
- apiGroups: [deltashard.io]
  resources: [checkpointrequests] # created by users; deleted some days after their end
  verbs: [get, list, watch, delete]
- apiGroups: [deltashard.io]
  resources: [checkpointruns/status, checkpointpolicies/status, checkpointrequests/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

{{- define "deltashard.webhook.rules" -}}
- apiGroups: [deltashard.io]
  resources: [checkpointpolicies]
  verbs: [get, list, watch]
- apiGroups: [deltashard.io]
  resources: [checkpointruns] # whether another live workload holds a run-id
  verbs: [list]
# Whether the workload that holds it has ended or is deleted, even if the controller has not recorded it yet.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list]
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
{{- end }}
