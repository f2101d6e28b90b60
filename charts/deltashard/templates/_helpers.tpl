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
{{- if .Values.reclaim.enabled -}}
{{- $_ := set $base "reclaiming" (dict "enabled" true) -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $base (deepCopy .Values.defaultPolicy)) }}
{{- end }}

{{/* Ends with a sentence where the default policy's store has words of another kind of store, or none of its own. */}}
{{- define "deltashard.checkDefaultPolicy" -}}
{{- if and (eq (.Values.defaultPolicy.reclaimPolicy | default "Retain") "Delete") (not .Values.reclaim.enabled) -}}
{{- fail "defaultPolicy.reclaimPolicy Delete removes nothing without reclaim.enabled" -}}
{{- end -}}
{{- $store := .Values.defaultPolicy.store | default dict -}}
{{- $scheme := splitList ":" ($store.url | default "s3:") | first -}}
{{- $identity := $store.webIdentity | default dict -}}
{{- range list "region" "addressing" "encryption" -}}
{{- if and (ne $scheme "s3") (get $store .) -}}
{{- fail (printf "defaultPolicy.store.%s is a word of s3:// alone, and the store is %s" . $store.url) -}}
{{- end -}}
{{- end -}}
{{- if and $store.account (ne $scheme "az") -}}
{{- fail (printf "defaultPolicy.store.account is a word of az:// alone, and the store is %s" $store.url) -}}
{{- end -}}
{{- if and (hasKey $store "webIdentity") (eq $scheme "gs") -}}
{{- fail "defaultPolicy.store.webIdentity is nothing for gs://: GKE gives the pod's service account its identity, by an annotation of that account" -}}
{{- end -}}
{{- range $key, $only := dict "roleArn" "s3" "stsEndpoint" "s3" "clientId" "az" "tenantId" "az" "authorityHost" "az" -}}
{{- if and (get $identity $key) (ne $scheme $only) -}}
{{- fail (printf "defaultPolicy.store.webIdentity.%s is a word of %s:// alone, and the store is %s" $key $only $store.url) -}}
{{- end -}}
{{- end -}}
{{- if and (hasKey $store "webIdentity") (eq $scheme "az") (not (and $identity.clientId $identity.tenantId)) -}}
{{- fail "defaultPolicy.store.webIdentity needs clientId and tenantId for az://" -}}
{{- end -}}
{{- $encryption := $store.encryption | default dict -}}
{{- if and $encryption.keyId (ne $encryption.kind "SSE-KMS") -}}
{{- fail "defaultPolicy.store.encryption.keyId belongs to kind SSE-KMS" -}}
{{- end -}}
{{- $network := .Values.defaultPolicy.network | default dict -}}
{{- if and $network.noProxy (not (or $network.httpsProxy $network.httpProxy)) -}}
{{- fail "defaultPolicy.network.noProxy is nothing without httpsProxy or httpProxy" -}}
{{- end -}}
{{- $sidecar := .Values.defaultPolicy.sidecar | default dict -}}
{{- $names := list -}}
{{- range $sidecar.volumes -}}{{- $names = append $names .name -}}{{- end -}}
{{- range $sidecar.volumeMounts -}}
{{- $path := .mountPath -}}
{{- if not (has .name $names) -}}
{{- fail (printf "defaultPolicy.sidecar.volumeMounts: %s names none of defaultPolicy.sidecar.volumes" .name) -}}
{{- end -}}
{{- range list "/run/deltashard" "/var/cache/deltashard" "/etc/deltashard" "/var/run/secrets/deltashard" -}}
{{- if or (hasPrefix (printf "%s/" .) (printf "%s/" $path)) (hasPrefix (printf "%s/" $path) (printf "%s/" .)) -}}
{{- fail (printf "defaultPolicy.sidecar.volumeMounts: %s is in or above %s, which is the sidecar's own" $path .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
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
