{{/* Labels of every object; takes a dict of `root` and `component`. */}}
{{- define "deltashard.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_") }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: deltashard
{{ include "deltashard.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The labels a component's pods are selected by. */}}
{{- define "deltashard.selector" -}}
app.kubernetes.io/name: deltashard
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* An image's reference; takes a dict of `root` and `image`. */}}
{{- define "deltashard.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* Address at which sidecars reach the controller. */}}
{{- define "deltashard.fleet" -}}
deltashard-fleet.{{ .Release.Namespace }}.svc:9443
{{- end }}

{{/* The default policy's spec: what the values say, and what no namespace should have to. */}}
{{- define "deltashard.defaultPolicy" -}}
{{- $sidecar := dict "image" (include "deltashard.image" (dict "root" . "image" .Values.sidecarImage)) "imagePullPolicy" .Values.sidecarImage.pullPolicy -}}
{{- $fleet := dict "address" (include "deltashard.fleet" .) -}}
{{- $base := dict "sidecar" $sidecar "fleet" $fleet -}}
{{- if not (or (hasKey .Values.defaultPolicy "intervalSeconds") (hasKey .Values.defaultPolicy "everySteps")) -}}
{{- $_ := set $base "interval" (dict "goal" "auto") -}}
{{- end -}}
{{- if not .Values.deciding.enabled -}}
{{- $_ := set $base "deciding" (dict "enabled" false) -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $base (deepCopy .Values.defaultPolicy)) }}
{{- end }}

{{/* Security context of every pod: what PodSecurity's `restricted` asks for. */}}
{{- define "deltashard.podSecurity" -}}
runAsNonRoot: true
{{- if not (kindIs "invalid" .Values.runAsUser) }}
runAsUser: {{ .Values.runAsUser | int64 }}
runAsGroup: {{ .Values.runAsUser | int64 }}
fsGroup: {{ .Values.runAsUser | int64 }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "deltashard.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Names of the Secrets that hold the two certificates. */}}
{{- define "deltashard.webhookSecret" -}}
{{ eq .Values.certificates.mode "existing" | ternary .Values.certificates.existing.webhookSecret "deltashard-webhook-tls" }}
{{- end }}
{{- define "deltashard.fleetSecret" -}}
{{ eq .Values.certificates.mode "existing" | ternary .Values.certificates.existing.fleetSecret "deltashard-fleet-tls" }}
{{- end }}

{{/* Where a component's pods may be scheduled; takes the component's values. */}}
{{- define "deltashard.scheduling" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What every pod of the chart may reach, where network policies are on. */}}
{{- define "deltashard.egress" -}}
egress:
  - ports: # names
      - {port: 53, protocol: UDP}
      - {port: 53, protocol: TCP}
  - ports: # the API server, whose address no selector knows
      {{- range .Values.networkPolicies.apiServerPorts }}
      - port: {{ . }}
      {{- end }}
{{- end }}

{{/* Where `helm test` makes its dry runs. */}}
{{- define "deltashard.testNamespace" -}}
{{- .Values.test.namespace | default (first .Values.watchNamespaces) | default "default" }}
{{- end }}

{{/* Non-empty where the API has ValidatingAdmissionPolicies. */}}
{{- define "deltashard.hasPolicies" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}yes{{ end }}
{{- end }}
