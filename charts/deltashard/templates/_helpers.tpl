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

{{/* Selector labels of a component's pods. */}}
{{- define "deltashard.selector" -}}
app.kubernetes.io/name: deltashard
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* An image's reference; takes a dict of `root` and `image`. */}}
{{- define "deltashard.image" -}}
{{- $repository := .image.repository -}}
{{- with .root.Values.global.imageRegistry -}}
{{- $repository = printf "%s/%s" . (regexReplaceAll "^[^/]*[.:][^/]*/" $repository "") -}}
{{- end -}}
{{- if .image.digest -}}
{{ $repository }}@{{ .image.digest }}
{{- else -}}
{{ $repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* Name of a component's service account; takes a dict of `root` and `component`. */}}
{{- define "deltashard.account" -}}
{{- $account := (get .root.Values .component).serviceAccount -}}
{{- if not (or $account.create $account.name) -}}
{{- fail (printf "%s.serviceAccount.create is false, so %s.serviceAccount.name must be the name of an existing account" .component .component) -}}
{{- end -}}
{{- $account.name | default (printf "deltashard-%s" .component) -}}
{{- end }}

{{/* The service account, if the chart creates it; takes the same. */}}
{{- define "deltashard.serviceAccount" -}}
{{- $account := (get .root.Values .component).serviceAccount -}}
{{- if $account.create }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "deltashard.account" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "deltashard.labels" . | nindent 4 }}
  {{- with $account.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* A Service's metadata below its labels, and the head of its spec. */}}
{{- define "deltashard.serviceHead" -}}
{{- with .Values.service.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
{{- end }}
spec:
  {{- with .Values.service.ipFamilyPolicy }}
  ipFamilyPolicy: {{ . }}
  {{- end }}
  {{- with .Values.service.ipFamilies }}
  ipFamilies: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Address at which sidecars reach the controller. */}}
{{- define "deltashard.fleet" -}}
deltashard-fleet.{{ .Release.Namespace }}.svc:9443
{{- end }}

{{/* Spec of the default policy: the values, and the cluster-wide settings. */}}
{{- define "deltashard.defaultPolicy" -}}
{{- $sidecar := dict "image" (include "deltashard.image" (dict "root" . "image" .Values.sidecarImage)) "imagePullPolicy" .Values.sidecarImage.pullPolicy -}}
{{- $fleet := dict "address" (include "deltashard.fleet" .) -}}
{{- $base := dict "sidecar" $sidecar "fleet" $fleet -}}
{{- $interval := .Values.defaultPolicy.interval | default dict -}}
{{- if not (or (hasKey $interval "every") (hasKey $interval "everySteps") (hasKey $interval "goal")) -}}
{{- $_ := set $base "interval" (dict "goal" (dict "type" "Auto")) -}}
{{- end -}}
{{- if not .Values.deciding.enabled -}}
{{- $_ := set $base "deciding" (dict "enabled" false) -}}
{{- end -}}
{{- if .Values.reclaim.enabled -}}
{{- $labels := .Values.reclaim.jobLabels -}}
{{- $_ := set $base "reclaiming" (ternary (dict "enabled" true "labels" $labels) (dict "enabled" true) (not (empty $labels))) -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $base (deepCopy .Values.defaultPolicy)) }}
{{- end }}

{{/* Fails if the default policy needs a feature that the values disable; the schema validates the rest. */}}
{{- define "deltashard.checkDefaultPolicy" -}}
{{- $reclaim := .Values.defaultPolicy.reclaim | default dict -}}
{{- if and (eq ($reclaim.policy | default "Retain") "Delete") (not .Values.reclaim.enabled) -}}
{{- fail "defaultPolicy.reclaim.policy Delete removes nothing without reclaim.enabled" -}}
{{- end -}}
{{- end }}

{{/* Security context of every pod: the requirements of PodSecurity `restricted`, with the values merged over them. */}}
{{- define "deltashard.podSecurity" -}}
{{- $base := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if not (kindIs "invalid" .Values.runAsUser) -}}
{{- range list "runAsUser" "runAsGroup" "fsGroup" -}}
{{- $_ := set $base . ($.Values.runAsUser | int64) -}}
{{- end -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $base (deepCopy .Values.podSecurityContext)) }}
{{- end }}

{{- define "deltashard.containerSecurity" -}}
{{- $base := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- toYaml (mustMergeOverwrite $base (deepCopy .Values.securityContext)) }}
{{- end }}

{{/* Name of the Secret with a server's certificate: one in mode builtin. */}}
{{- define "deltashard.webhookSecret" -}}
{{ get (dict "builtin" "deltashard-tls" "existing" .Values.certificates.existing.webhookSecret) .Values.certificates.mode | default "deltashard-webhook-tls" }}
{{- end }}
{{- define "deltashard.fleetSecret" -}}
{{ get (dict "builtin" "deltashard-tls" "existing" .Values.certificates.existing.fleetSecret) .Values.certificates.mode | default "deltashard-fleet-tls" }}
{{- end }}

{{/* Common fields of all pods: placement, user and pull secrets; takes a dict of `root` and `component`. */}}
{{- define "deltashard.pod" -}}
{{- $global := .root.Values.global -}}
{{- $own := get .root.Values .component | default dict -}}
enableServiceLinks: false
securityContext: {{- include "deltashard.podSecurity" .root | nindent 2 }}
{{- with concat .root.Values.imagePullSecrets $global.imagePullSecrets | uniq }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
nodeSelector: {{- toYaml (mustMergeOverwrite (dict "kubernetes.io/os" "linux") $global.nodeSelector ($own.nodeSelector | default dict)) | nindent 2 }}
{{- with concat ($own.tolerations | default list) $global.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $own.affinity }}
affinity: {{- toYaml $own.affinity | nindent 2 }}
{{- else if $own.topologySpread }}
{{- /* A spread constraint on zones would exclude nodes without a zone, also from the constraint on nodes. */}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: topology.kubernetes.io/zone
          labelSelector:
            matchLabels: {{- include "deltashard.selector" . | nindent 14 }}
{{- end }}
{{- if $own.topologySpread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ $own.topologySpread }}
    labelSelector:
      matchLabels: {{- include "deltashard.selector" . | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
{{- end }}
{{- end }}

{{/* Metadata of a Deployment's pods; takes the same. */}}
{{- define "deltashard.podMetadata" -}}
{{- $own := get .root.Values .component -}}
labels:
  {{- include "deltashard.labels" . | nindent 2 }}
  {{- with $own.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  kubectl.kubernetes.io/default-container: {{ .component }}
  deltashard.io/default-policy-sum: {{ include "deltashard.defaultPolicy" .root | sha256sum }} # restarts the pods on a change, because the policy is read only at the start
  {{- with $own.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Metadata of a monitor or rule; takes a dict of `root`, `name` and its values as `own`. */}}
{{- define "deltashard.monitor" -}}
name: {{ .name }}
namespace: {{ .own.namespace | default .root.Release.Namespace }}
labels:
  {{- include "deltashard.labels" (dict "root" .root "component" "monitoring") | nindent 2 }}
  {{- with merge (dict) .own.labels .root.Values.monitoring.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Name, duration and labels of an alert; takes a list of the root, its name, its `for` and its severity. */}}
{{- define "deltashard.alert" -}}
{{- $rules := (index . 0).Values.monitoring.rules -}}
{{- $own := get $rules.alerts (index . 1) | default dict -}}
alert: {{ index . 1 }}
{{- with $own.for | default (index . 2) }}
for: {{ . }}
{{- end }}
labels: {{- toYaml (merge (dict "severity" ($own.severity | default (index . 3))) $rules.alertLabels) | nindent 2 }}
{{- end }}

{{/* Egress of every pod of the chart, if network policies are enabled. */}}
{{- define "deltashard.egress" -}}
egress:
  - ports: # DNS
      - {port: 53, protocol: UDP}
      - {port: 53, protocol: TCP}
  - ports: # the API server, which has no labels to select
      {{- range .Values.networkPolicies.apiServerPorts }}
      - port: {{ . }}
      {{- end }}
{{- end }}

{{/* Namespace of the dry runs of `helm test`. */}}
{{- define "deltashard.testNamespace" -}}
{{- .Values.test.namespace | default (first .Values.watchNamespaces) | default "default" }}
{{- end }}

{{/* Non-empty if the API has ValidatingAdmissionPolicies. */}}
{{- define "deltashard.hasPolicies" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}yes{{ end }}
{{- end }}
